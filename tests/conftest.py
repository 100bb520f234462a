"""Started in the background (`pytest &`), pytest ignores Ctrl-C, and so would the programs that tests send one to."""

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
