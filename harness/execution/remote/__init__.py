"""Running compiled code on other machines: TVM's RPC tracker, the server of `sam3-tvm serve-device`, and its client.

A machine that serves registers with a tracker under a key. A client asks the tracker for a session, which is a process
of its own over there, uploads what that machine does not have yet, and runs it.
"""
