"""The experiments that ranks run, as data; no scenario knows a verdict.

``model`` defines what a scenario is, and ``profiles`` the backends and devices that ranks run on.
``hook``, ``averager``, ``collective``, ``joinable``, ``optimizer``, ``strategy`` and ``wrapper``
have the scenarios of each kind of subject, with the choices that the ranks and the rules have to
make alike. ``gradients`` makes the gradients that ranks feed, and ``collective_messages`` the
messages of quantized collectives. Ranks, rules and the session all read this package.
"""
