def run(task, operands):
    raise NotImplementedError
