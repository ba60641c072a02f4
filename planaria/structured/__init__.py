"""Outputs of a given form: grammars as the library llguidance has them, checked where they come in and followed where
tokens are drawn. Imported when a request first asks for one."""
