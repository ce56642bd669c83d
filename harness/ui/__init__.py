"""The page of `sam3-tvm ui`: a photograph is chosen, clicked and asked in a browser, and its masks are downloaded.

Only the standard library and what the base installation has is needed to import this package; `harness.ui.routes`,
`harness.ui.app` and `harness.ui.serving` need the extra `ui`.
"""
