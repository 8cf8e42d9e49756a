// Runs kernels of shared objects, as lines of its input ask for:
//   library symbol pointers offset... scalars scalar...
// Offsets are into a file that the caller maps as well; the answer is a line when a kernel has run.
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

constexpr int MOST = 1024;

static int fail(const char* what) {
  printf("%s\n", what);
  fflush(stdout);
  return 1;
}

int main(int, char** arguments) {
  const int file = open(arguments[1], O_RDWR);
  struct stat found;
  if (file < 0 || fstat(file, &found)) return fail("no memory");
  char* const memory = static_cast<char*>(
      mmap(nullptr, found.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
  if (memory == MAP_FAILED) return fail("memory cannot be mapped");
  static void* pointers[MOST];
  static int64_t scalars[MOST];
  char path[4096], symbol[512];
  int count;
  while (scanf("%4095s %511s %d", path, symbol, &count) == 3 && count <= MOST) {
    for (int i = 0; i < count; ++i) {
      long offset;
      if (scanf("%ld", &offset) != 1) return fail("no offset");
      pointers[i] = offset < 0 ? nullptr : memory + offset;
    }
    if (scanf("%d", &count) != 1 || count > MOST) return fail("no scalars");
    for (int i = 0; i < count; ++i)
      if (scanf("%ld", &scalars[i]) != 1) return fail("no scalar");
    void* const library = dlopen(path, RTLD_NOW);
    if (!library) return fail(dlerror());
    void* const kernel = dlsym(library, symbol);
    if (!kernel) return fail("no such symbol");
    reinterpret_cast<void (*)(void* const*, const int64_t*)>(kernel)(pointers, scalars);
    printf("done\n");
    fflush(stdout);
  }
}
