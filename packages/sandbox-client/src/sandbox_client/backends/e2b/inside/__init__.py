"""Programs that run inside E2B's sandboxes, sent along with each call.

Each is one file for Python 3.7 or later with its standard library alone, and talks by lines of
text: a letter, a blank, base64 or JSON.
"""
