"""The page of `sam3-tvm ui`: a photograph is clicked and asked in a browser, and its masks are downloaded.

Its server needs the extra `ui`.
"""
