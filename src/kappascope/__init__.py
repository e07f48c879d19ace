"""A laboratory and clinic for the weight matrices of neural networks."""

__version__ = "0.1.0"

from kappascope.components import Components, errors

__all__ = ["Components", "errors"]
