"""Rules of a configuration beyond single values: each is an entry that yields problems by key.

`model` and `experiment` have what is impossible together, `unused` what means nothing beside other choices, and
`doubtful` what is allowed, but probably a mistake.
"""
