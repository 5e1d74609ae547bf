"""What runs inside: the fork-server and the first process of every sandbox.

These modules run under the host's base interpreter without any installed package, so they import
the standard library and each other, nothing else.
"""
