"""Trials make rows, rows make estimates, and estimates decide claims."""
