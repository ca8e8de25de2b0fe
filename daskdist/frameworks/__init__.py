"""Other frameworks: their arrays made of ours, and what they train with fed by our datasets.

Each framework is one sibling file and an extra of its name. A framework is imported when a function of its file is
called, never before.
"""
