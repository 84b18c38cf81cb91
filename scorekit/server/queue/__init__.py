"""The queue between requests and the model: admission, tokenizing, batches, the model's threads.

A comment names the owner of each attribute (`# owner: ...`), or once for a class (`Owner: ...`):
`loop`, the thread of the event loop; `tokenizer` and `model`, the threads of these names (several
model threads if the backend has `workers`); `lock`, the holder of the named lock; `fixed`, set
before the threads start and then only read; `any`, safe in every thread.
"""
