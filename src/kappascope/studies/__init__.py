"""One study of real networks a page; :mod:`kappascope.lab.experiment` discovers them."""
