"""Study of whether weights tell how good a network of handwritten digits is."""
