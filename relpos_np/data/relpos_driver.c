/* Runs a kernel on the cases of relpos_vectors.h: link it with a file that defines `attend`, and look at the exit code.
 *
 *     cc -std=c99 -O2 relpos_driver.c mine.c -lm && ./a.out
 *
 * attend(c, out) writes (B, H, L_q, D_v) numbers into out, which holds NaN before.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "relpos_vectors.h"

void attend(const relpos_case *c, float *out);

/* The largest difference of a case; infinite where something is NaN. */
static double error_of(const relpos_case *c, const float *out, long count, long *where)
{
    double worst = 0.0;
    for (long n = 0; n < count; n++) {
        double off = fabs((double)out[n] - c->out[n] * RELPOS_UNIT);
        if (isnan(off))
            off = HUGE_VAL;
        if (off > worst) {
            worst = off;
            *where = n;
        }
    }
    return worst;
}

int main(void)
{
    int wrong = 0;
    for (int n = 0; n < RELPOS_CASES; n++) {
        const relpos_case *c = &relpos_cases[n];
        long count = (long)c->B * c->H * c->L_q * c->D_v, where = 0;
        float *out = (float *)malloc(count * sizeof *out);
        if (!out)
            return 2;
        for (long i = 0; i < count; i++)
            out[i] = NAN;
        attend(c, out);
        double error = error_of(c, out, count, &where);
        int bad = !(error <= c->atol);
        wrong += bad;
        printf("%s %s: off by %.3g, allowed %.3g", bad ? "WRONG" : "right", c->name, error, c->atol);
        if (bad)
            printf(", first at head %ld, query %ld", where / c->D_v / c->L_q % c->H, where / c->D_v % c->L_q);
        printf("\n");
        free(out);
    }
    printf("%d of %d cases are right\n", RELPOS_CASES - wrong, RELPOS_CASES);
    return wrong > 0;
}
