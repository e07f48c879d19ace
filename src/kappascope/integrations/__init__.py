"""Callbacks for other people's trainers: the only room that imports one."""
