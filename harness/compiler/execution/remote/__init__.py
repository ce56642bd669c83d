"""Runs compiled code on another machine over TVM's own RPC: `device` is the server's end, `client` and `model` ours."""
