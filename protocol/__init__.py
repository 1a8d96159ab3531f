"""What crosses a process boundary, and nothing else.

The law of this package: no sockets, no clock, no framework. Bytes in, frozen values out; values in, bytes out.
Whatever decodes here has been checked: size first, then types, then lengths and finiteness. What fails raises a
`ProtocolError` with a `reason`, and never anything else.
"""
