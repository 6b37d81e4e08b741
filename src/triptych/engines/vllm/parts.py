"""What a worker of vLLM has loaded of a checkpoint: towers, language model, or both.

vLLM mixes ``Parts`` into its worker, in the worker's own process, where it sees which parts are
there. How large they are is read from the checkpoint: on a CPU vLLM packs weights away, so that
they are no parameters any more.
"""

from __future__ import annotations

from typing import Any

LOADED_PARTS = "has_parts"
KV_GROUPS = "kv_groups"


class WorkerExtension:
    model_runner: Any  # of vLLM's worker

    def has_parts(self) -> tuple[bool, bool]:
        """Whether there are towers, and a language model.

        Of those that were left out vLLM keeps a stand-in that is no module of the model.
        """
        model = self.model_runner.get_model()
        language = tuple(f"{name}." for name in getattr(model, "_language_model_names", ()))
        found = {name.startswith(language or "") for name, _ in model.named_parameters()}
        return False in found, True in found

    def kv_groups(self) -> int:
        """Groups of layers whose blocks are handed over."""
        return len(self.model_runner.kv_cache_config.transfer_groups)
