"""How many operations the chunked delta rule takes."""


def operations(sizes: dict[str, int], keys: int) -> tuple[int, int]:
    """Of the matrix products, forward and backward: two for each multiply-add.

    sizes: of the axes of the operator.  keys: products of C by C by K in the backward pass, beside
    those that compute w, u and the states again.
    """
    token, C, K, V = 2 * sizes["B"] * sizes["T"] * sizes["HV"], sizes["C"], sizes["K"], sizes["V"]
    forward = token * (C * (3 * K + 2 * V) + 3 * K * V)
    again = token * (C * (K + V) + 2 * K * V)  # wy and state
    return forward, again + token * (C * (keys * K + 4 * V) + 6 * K * V)
