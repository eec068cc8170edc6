"""The ground floor: errors, reading within limits, files and folders that are whole or absent, processes,
the terminal. Imports no other room.
"""
