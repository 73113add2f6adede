// Calls kernels of a shared object as told on standard input, so that a test can run them under an emulator.
//
// Commands, each after one letter, in the byte order of the machine:
//   B id bytes data            make a buffer
//   P id offset target         write the address of buffer `target` into buffer `id`
//   C name ints floats         call a function; answers its result
//   R id                       answers the buffer's data
// An argument is a number, or a buffer (of which the address is passed).
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

namespace {

struct alignas(64) Line {
    char bytes[64];
};

struct Buffer {
    std::vector<Line> lines;
    int64_t size = 0;
};

constexpr int MAX_INTS = 24, MAX_FLOATS = 4;

// Integers and floats are passed in separate registers on ARM and x86, so their order among each other does not matter,
// and surplus arguments do no harm.
using Function = int64_t (*)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                             int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                             int64_t, int64_t, int64_t, int64_t, float, float, float, float);

void fail(const char* what) {
    fprintf(stderr, "call_kernels: %s\n", what);
    exit(1);
}

void read_bytes(void* to, size_t size) {
    if (size && fread(to, size, 1, stdin) != 1) fail("the input ended inside a command");
}

template <typename T>
T read_one() {
    T value;
    read_bytes(&value, sizeof value);
    return value;
}

void write_bytes(const void* from, size_t size) {
    if (size) fwrite(from, size, 1, stdout);
    fflush(stdout);
}

std::map<int64_t, Buffer> buffers;

char* address_of(int64_t id) { return (char*)buffers.at(id).lines.data(); }

void call(void* object) {
    std::string name(read_one<int64_t>(), 0);
    read_bytes(name.data(), name.size());
    int64_t ints[MAX_INTS] = {};
    float floats[MAX_FLOATS] = {};
    int64_t num_ints = read_one<int64_t>();
    for (int64_t i = 0; i < num_ints; i++) {
        int64_t is_buffer = read_one<int64_t>(), value = read_one<int64_t>();
        ints[i] = is_buffer ? (int64_t)address_of(value) : value;
    }
    int64_t num_floats = read_one<int64_t>();
    for (int64_t i = 0; i < num_floats; i++) floats[i] = read_one<float>();
    auto function = (Function)dlsym(object, name.c_str());
    if (!function) fail(("no function " + name).c_str());
    int64_t* n = ints;
    int64_t result =
        function(n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10], n[11], n[12], n[13], n[14], n[15],
                 n[16], n[17], n[18], n[19], n[20], n[21], n[22], n[23], floats[0], floats[1], floats[2], floats[3]);
    write_bytes(&result, sizeof result);
}

}  // namespace

int main(int, char** arguments) {
    void* object = dlopen(arguments[1], RTLD_NOW);
    if (!object) fail(dlerror());
    for (int command = getchar(); command != EOF; command = getchar()) {
        if (command == 'C') {
            call(object);
            continue;
        }
        int64_t id = read_one<int64_t>();
        if (command == 'B') {
            Buffer& buffer = buffers[id];
            buffer.size = read_one<int64_t>();
            buffer.lines.resize(buffer.size / 64 + 2);
            read_bytes(address_of(id), buffer.size);
        } else if (command == 'P') {
            int64_t offset = read_one<int64_t>(), target = read_one<int64_t>();
            *(char**)(address_of(id) + offset) = address_of(target);
        } else if (command == 'R') {
            write_bytes(address_of(id), buffers.at(id).size);
        }
    }
}
