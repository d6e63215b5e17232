"""Jobs: files of requests in OpenAI's batch format, answered line by line into a file, whatever dies meanwhile."""
