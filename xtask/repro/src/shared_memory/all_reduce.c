/* All-reduce as the bench `shared-memory` measures it, in MPI: arguments are KiB and iterations. Rank 0 prints
 * the median seconds of the slowest rank, out of place and in place. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    int rank, size;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    if (argc != 3) MPI_Abort(MPI_COMM_WORLD, 2);
    int count = atoi(argv[1]) * 256, iterations = atoi(argv[2]);
    float *x = malloc(count * sizeof(float)), *y = malloc(count * sizeof(float));
    double *times = malloc(iterations * sizeof(double)), *slowest = malloc(iterations * sizeof(double));
    memset(y, 0, count * sizeof(float));
    for (int in_place = 0; in_place < 2; in_place++) {
        for (int i = -2; i < iterations; i++) {
            for (int j = 0; j < count; j++) x[j] = 1.0f;
            MPI_Barrier(MPI_COMM_WORLD);
            double start = MPI_Wtime();
            if (in_place)
                MPI_Allreduce(MPI_IN_PLACE, x, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
            else
                MPI_Allreduce(x, y, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
            if (i >= 0) times[i] = MPI_Wtime() - start;
            if ((in_place ? x : y)[count - 1] != (float)size) MPI_Abort(MPI_COMM_WORLD, 3);
        }
        MPI_Allreduce(times, slowest, iterations, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
        qsort(slowest, iterations, sizeof(double), by_value);
        if (rank == 0) printf("%.9f\n", slowest[iterations / 2]);
    }
    MPI_Finalize();
    return 0;
}
