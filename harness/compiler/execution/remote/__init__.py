"""Runs compiled code on another machine over TVM's own RPC: `device` is the server's side, `client` this machine's."""
