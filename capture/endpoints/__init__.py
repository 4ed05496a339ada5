"""The target as an OpenAI-compatible server runs it: asked over HTTP, its answers taken back as tokens where it can.

``server.py`` is one server, ``dialects.py`` what it is asked and answers, ``window.py`` how many answers at a time,
``pool.py`` several servers with one list of prompts, ``prometheus.py`` its counters.
"""
