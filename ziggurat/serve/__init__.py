"""A translation server for people and programs, over HTTP (docs/serve.md): `ziggurat serve`.

`queue` orders lines fairly, `engine` translates the lines of one model in a separate thread, and `pool` holds the
models. `translation_request` turns a request into lines and their translations into an answer; `notices` words what
needed special handling. The rest is HTTP.
"""
