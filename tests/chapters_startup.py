"""What nbval runs first in a chapter: the interpreter of the tests, once Triton is there."""


def start(shell, tests):
    """In a function, and deleted: a chapter that forgets an import is not to find it here."""
    import os
    import sys

    def quicken_the_interpreter(*_):
        """After the cell that imports Triton: that decides whether it is interpreted."""
        if "triton" not in sys.modules:
            return
        shell.events.unregister("post_run_cell", quicken_the_interpreter)
        if os.environ.get("TRITON_INTERPRET") == "1":
            sys.path.append(tests)
            from interpreter import quicken

            quicken(replay=False)
            sys.path.remove(tests)

    shell.events.register("post_run_cell", quicken_the_interpreter)


start(get_ipython(), __file__.rpartition("/")[0])  # noqa: F821
del start
