"""What can happen to a script from outside, ended in one line and an exit code: settings that cannot be, stop signals,
a full disk, too little memory, a pipe that nobody reads any more.

    if __name__ == "__main__":
        sys.exit(guarded(lambda signals: work(parse(Args, __doc__))))
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import envs
from envs import system
from envs.errors import ConfigError, short

NO_PATH = (errno.ENAMETOOLONG, errno.ELOOP)  # what no machine takes for a path: a wrong setting


class Stop(BaseException):
    """A stop signal, at a moment at which there is nothing to save."""

    def __init__(self, number: int):
        self.number = number


class StopSignals:
    """Ctrl-C and its kin: an exception at once, or, while `hold` is set, a note to look at."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self.hold = False

    def __enter__(self) -> StopSignals:
        self.before = {number: signal.getsignal(number) for number in system.STOP_SIGNALS}
        for number, handler in self.before.items():
            if handler != signal.SIG_IGN or number == signal.SIGINT:  # ignored: nohup
                signal.signal(number, self.receive)
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def receive(self, number: int, _: Any) -> None:
        self.received.append(number)
        if not self.hold:
            raise Stop(number)


class Unheard:
    """An output stream that goes on when nobody reads it any more: a closed pipe does not end a training."""

    def __init__(self, stream: Any):
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        self.attempt("write", text)
        return len(text)

    def flush(self) -> None:
        self.attempt("flush")

    def attempt(self, what: str, *args: Any) -> None:
        try:
            getattr(self.stream, what)(*args)
        except UnicodeEncodeError:  # a terminal that does not know the letters of a path
            self.attempt(what, *(text.encode("ascii", "backslashreplace").decode() for text in args))
        except (OSError, ValueError, AttributeError):
            try:  # what is buffered goes nowhere too, or Python would complain at its end
                with open(os.devnull, "wb") as nowhere:
                    os.dup2(nowhere.fileno(), self.stream.fileno())
            except (OSError, ValueError, AttributeError):
                self.stream = open(os.devnull, "w", encoding="utf-8")


def fail(error: BaseException | str, code: int = 2) -> int:
    """One line for whoever reads; returns the exit code."""
    print("error:", " ".join(str(error).splitlines()), file=sys.stderr, flush=True)
    return code


def guarded(work: Callable[[StopSignals], int | None]) -> int:
    """Do the work of a whole script; returns the exit code: 2 for what the user can mend in the command, 1 for what the
    machine refuses, 128 + n for signal n."""
    streams, signals = (sys.stdout, sys.stderr), StopSignals()
    sys.stdout, sys.stderr = Unheard(sys.stdout), Unheard(sys.stderr)
    try:
        with signals:
            if envs.interrupts:  # in the imports, and no library let it through
                signals.receive(envs.interrupts.pop(), None)
            return work(signals) or 0
    except ConfigError as error:
        return fail(error)
    except OSError as error:
        return fail(error, 2 if error.errno in NO_PATH else 1)
    except UnicodeEncodeError as error:
        return fail(f"{short(error.object)} is no text, and no name of a file: {error.reason}")
    except MemoryError as error:
        return fail(f"not enough memory: {error}", 1)
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):  # torch's
            raise
        return fail(f"not enough memory: {error}", 1)
    except (Stop, SystemError):
        if not signals.received:
            raise
        print("stopped: there is nothing to save")  # in the middle of a parser, Python turns a Stop into a SystemError
        return 128 + signals.received[0]
    finally:
        sys.stdout.flush()
        sys.stdout, sys.stderr = streams
