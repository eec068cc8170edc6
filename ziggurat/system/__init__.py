"""The lowest room: errors, bounded reading, atomic files and folders, processes, the terminal.

It imports no other room.
"""
