"""One experiment a page; :mod:`kappascope.lab` discovers them."""
