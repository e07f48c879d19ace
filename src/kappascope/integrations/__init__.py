"""Adapters to the trainers and loggers of others; each is loaded only when it is asked for."""
