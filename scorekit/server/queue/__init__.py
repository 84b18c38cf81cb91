"""The queue between requests and the model: admission, tokenizing, batches, the model's threads.

Who may touch an attribute stands behind it (`# owner: ...`), or once for a class (`Owner: ...`):
`loop`, the thread of the event loop; `tokeniser` and `model`, the threads of these names (of the
model several, where the backend has `workers`); `lock`, whoever holds the lock that stands there;
`fixed`, set before the threads start and then only read; `any`, safe from everywhere.
"""
