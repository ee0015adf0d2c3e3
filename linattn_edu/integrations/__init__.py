"""One line that puts a model of another library on the operators of this one."""
