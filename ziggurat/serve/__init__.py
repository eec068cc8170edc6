"""A translator that people and programs use over HTTP (docs/serve.md): `ziggurat serve`.

`queue` orders lines fairly, `engine` translates those of one model in a separate thread, `pool` has the models, and
`translation_request` makes of a request its lines, and of their translations an answer; `notices` words what was not
translated in the ordinary way. The rest is HTTP.
"""
