"""Messages and rules that all processes share. Pure outside `protocol.runtime`: no sockets, files, clock, environment.

Decoders check size first, then types, then lengths and finiteness. Invalid input raises a `ProtocolError` with a
`reason`, and nothing else.
"""
