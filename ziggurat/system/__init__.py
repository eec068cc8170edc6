"""The lowest layer: errors, bounded reading, atomic files and folders, processes, the terminal.

It imports no other package of Ziggurat.
"""
