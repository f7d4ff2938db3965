from tests.triton_interpreter import interpreter as interpreter
