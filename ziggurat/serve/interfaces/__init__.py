"""The interfaces of a server, each with its paths: LibreTranslate's, DeepL's, OpenAI's, our own, and the web page."""
