"""The engine's real code in one thread, under virtual time and one seed that decides everything.

The engine keeps its decisions apart from waiting. Protocols are generators, and only a thin shell (threads, queues,
wake-ups, the store) blocks. The simulation replaces that shell, and nothing else. `kernel` runs one strand at a time,
`shell` replaces threads, and `server` replaces a replica set and applies the rule in Python. The processes of `world`
act like those of the fault runs, and `faults` breaks things. The checker of the fault runs judges the records.

The idea is that of FoundationDB's simulation. https://apple.github.io/foundationdb/testing.html
"""
