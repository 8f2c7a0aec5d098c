"""The OpenAI-compatible API over HTTP: a second door to the frontend, with the names that users of vLLM know.

``fields`` says what requests may hold, ``translate`` makes requests of the frontend from them, ``answers`` and
``tools`` shape what comes back, ``app`` has the routes and ``door`` the server.
"""
