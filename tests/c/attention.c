/* Attention as one writes it in C; with WRONG it aligns the causal mask top-left. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "relpos_vectors.h"

static int bucket(const relpos_case *c, int d)
{
    int count = c->rows, row = 0, exact;
    if (!strcmp(c->scheme, "t5")) {
        count /= 2;
        row = d > 0 ? count : 0;
        d = abs(d);
    } else
        d = d < 0 ? -d : 0;
    exact = count / 2;
    if (d >= exact) {
        double ratio = log((double)d / exact) / log((double)c->max_distance / exact);
        d = exact + (int)floor(ratio * (count - exact) + 1e-12);
        d = d < count ? d : count - 1;
    }
    return row + d;
}

/* Channel x of a head's vector at a position. */
static double channel(const relpos_case *c, const float *x, int at, int position)
{
    int half = !strcmp(c->scheme, "rotary"), pair = half ? at % (c->D / 2) : at / 2;
    int first = half ? pair : 2 * pair, second = half ? pair + c->D / 2 : 2 * pair + 1;
    double angle = position * pow(10000.0, -2.0 * pair / c->D);
    if (strncmp(c->scheme, "rotary", 6))
        return x[at];
    if (at == first)
        return x[first] * cos(angle) - x[second] * sin(angle);
    return x[first] * sin(angle) + x[second] * cos(angle);
}

static double score(const relpos_case *c, const float *q, const float *k, int h, int i, int j)
{
    int start = c->L_k - c->L_q, d = j - i - start;
    double s = 0.0;
#ifdef WRONG
    int last = j - i;
#else
    int last = d;
#endif
    if ((c->causal && last > 0) || (c->left >= 0 && d < -c->left) || (c->right >= 0 && d > c->right))
        return -INFINITY;
    for (int e = 0; e < c->D; e++)
        s += channel(c, q, e, i + start) * channel(c, k, e, j);
    s *= c->scale;
    if (!strcmp(c->scheme, "alibi"))
        s -= c->array[h] * abs(d);
    if (!strncmp(c->scheme, "t5", 2))
        s += c->array[bucket(c, d) * c->H + h];
    return s;
}

void attend(const relpos_case *c, float *out)
{
    double *p = (double *)malloc(c->L_k * sizeof *p);
    for (int b = 0; b < c->B; b++)
        for (int h = 0; h < c->H; h++)
            for (int i = 0; i < c->L_q; i++) {
                long row = ((long)b * c->H + h) * c->L_q + i, group = (long)b * c->H_kv + h / (c->H / c->H_kv);
                double top = -INFINITY, total = 0.0;
                for (int j = 0; j < c->L_k; j++) {
                    p[j] = score(c, c->q + row * c->D, c->k + (group * c->L_k + j) * c->D, h, i, j);
                    top = fmax(top, p[j]);
                }
                for (int j = 0; j < c->L_k; j++)
                    total += p[j] = exp(p[j] - top);
                for (int e = 0; e < c->D_v; e++) {
                    double sum = 0.0;
                    for (int j = 0; j < c->L_k; j++)
                        sum += p[j] * c->v[(group * c->L_k + j) * c->D_v + e];
                    out[row * c->D_v + e] = (float)(sum / total);
                }
            }
    free(p);
}
