"""The paper and its review: one experiment a file, discovered by `kappascope.lab.experiment`."""
