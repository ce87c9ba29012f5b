"""Text: tokenisers read from every common format or trained here, and chat templates.

tokenizer  Tokenizer, what a model is given            stream   text from ids as they come
folder     which files make a tokeniser                special  the files beside a vocabulary
wordpiece  bytelevel  sentencepiece  marian            one format each
foreign    tokenisers inside GGUF and llama2.c files   tiktoken the official Whisper's
trained    tokenisers learnt from your own text        chat     messages to a prompt
"""
