"""The interfaces of a server, each with its paths: LibreTranslate's, DeepL's, OpenAI's, its own, and the web page."""
