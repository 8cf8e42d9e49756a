"""Spread the rows of one call over several devices, in one process.

``settings`` says over which, ``rules`` which arguments have a row for each picture, ``split`` cuts
arguments and joins results, ``twin`` keeps a copy of a module equal on another device, and
``served`` is the dispatcher that does all of it.
"""
