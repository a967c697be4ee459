"""The command line: demo, chat, tune, bench, doctor."""
