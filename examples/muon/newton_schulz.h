/* SPDX-License-Identifier: Apache-2.0 */
/* Makes a matrix orthogonal, but for its scale: the singular values come near 1. */
#ifndef MUON_NEWTON_SCHULZ_H
#define MUON_NEWTON_SCHULZ_H

/* Overwrites the `rows` x `columns` numbers. Five steps of the quintic iteration of Keller Jordan's Muon (2024). The
 * order of all additions is fixed, so that equal matrices give equal bits on every rank. */
void orthogonalize(float *matrix, int rows, int columns);

#endif
