"""What tunes itself at its first call compiles its configurations side by side, then times them.

The same configurations are timed as without it, one by one on the GPU; only the wait is shorter.
"""

import os
from concurrent.futures import ThreadPoolExecutor


def compile_side_by_side(workers: int | None = None) -> None:
    """From here on, in this process, for every kernel under triton.autotune."""
    from triton.runtime._async_compile import AsyncCompileMode
    from triton.runtime.autotuner import Autotuner

    threads = workers or max(2, (os.cpu_count() or 2) // 2)
    prune = Autotuner.prune_configs

    def pruned(self, kwargs, *args, **options):
        configs = prune(self, kwargs, *args, **options)
        try:
            with ThreadPoolExecutor(threads) as pool, AsyncCompileMode(pool, ignore_errors=True):
                for config in configs:
                    given = {**kwargs, **config.all_kwargs(), "warmup": True}
                    self.fn.run(*self.nargs.values(), **given)
        except Exception as error:  # then each compiles when it is timed, and says what is wrong
            print(f"{self.base_fn.__name__} is compiled one by one: {error!r:.200}")
        return configs

    Autotuner.prune_configs = pruned
