"""NIXL as SGLang imports it, for a machine without a GPU: see ``_api``. For tests alone."""
