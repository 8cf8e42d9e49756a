"""Serve pictures over HTTP (``strop serve``).

A request passes the guard (``guard.py``), is read by one of three interfaces (``openai_api.py``,
``sdapi.py``, ``native_api.py``), becomes an ``Order`` (``order.py``) and waits in a line
(``line.py``) for a batch, which one thread draws (``studio.py``). All state but the model belongs
to the event loop (``service.py``), so nothing is locked.
"""
