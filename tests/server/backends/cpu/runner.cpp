// Calls functions of a library in this process, on the memory of the process that asks for the calls: so an emulator runs
// kernels that were compiled for another processor, on the very tensors of a test.
//
// A page of the other process is copied when it is first touched, to the address that it has there, so that pointers in
// structures hold. After a call, what changed is sent back and all pages are given up. Everything on the two pipes is in
// words of 8 bytes, texts and pages behind their lengths; see runner.py for the other end.

#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

namespace {

typedef int64_t Word;
constexpr Word PAGE = 4096, PAGES_AT_ONCE = 16;
enum Question : Word { FIND, CALL };
enum Answer : Word { WANTED, CHANGED, DONE };

[[noreturn]] void give_up(const char* why) {
    perror(why);
    _exit(3);
}

void send(const void* from, size_t bytes) {
    for (const char* at = static_cast<const char*>(from); bytes;) {
        const ssize_t count = write(STDOUT_FILENO, at, bytes);
        if (count <= 0) give_up("write");
        at += count, bytes -= size_t(count);
    }
}

void receive(void* to, size_t bytes) {
    for (char* at = static_cast<char*>(to); bytes;) {
        const ssize_t count = read(STDIN_FILENO, at, bytes);
        if (count <= 0) _exit(0);  // nobody asks any more
        at += count, bytes -= size_t(count);
    }
}

Word receive_word() {
    Word word;
    receive(&word, sizeof word);
    return word;
}

// Neighbouring pages of the other process: where they are, there and here, and where among the originals they are copied.
struct Pages {
    Word at, bytes, place;
};

void* map(void* at, Word bytes, int protection) {
    void* const found = mmap(at, size_t(bytes), protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (found == MAP_FAILED) give_up("mmap");
    return found;
}

class Mirror {
  public:
    void fetch(Word address) {
        pthread_mutex_lock(&lock_);
        const Word at = address / PAGE * PAGE;
        if (!is_here(at)) add(at);
        pthread_mutex_unlock(&lock_);
    }

    void give_back() {
        for (const Pages& pages : pages_) {
            for (Word i = 0; i < pages.bytes; i += PAGE) {
                const char* const was = &originals_[size_t(pages.place + i)];
                if (memcmp(reinterpret_cast<char*>(pages.at + i), was, PAGE)) send_changes(pages.at + i, was);
            }
            munmap(reinterpret_cast<void*>(pages.at), size_t(pages.bytes));
        }
        pages_.clear(), originals_.clear();
    }

  private:
    pthread_mutex_t lock_ = PTHREAD_MUTEX_INITIALIZER;
    std::vector<Pages> pages_;
    std::vector<char> originals_;

    bool is_here(Word at) const {
        for (const Pages& pages : pages_)
            if (at >= pages.at && at < pages.at + pages.bytes) return true;
        return false;
    }

    // Pages appear filled: another thread may read them at once. (A mapping of a file would not do, since an emulator may map
    // it in two steps.)
    void add(Word at) {
        Word most = 1;
        while (most < PAGES_AT_ONCE && !is_here(at + most * PAGE)) most++;
        const Word question[] = {WANTED, at, most * PAGE};
        send(question, sizeof question);
        const Pages pages{at, receive_word(), Word(originals_.size())};
        if (!pages.bytes) give_up("no memory of the other process");
        originals_.resize(size_t(pages.place + pages.bytes));
        char* const original = &originals_[size_t(pages.place)];
        receive(original, size_t(pages.bytes));
        void* const wanted = reinterpret_cast<void*>(at);
        if (map(wanted, pages.bytes, PROT_NONE) != wanted) give_up("the address is taken");
        void* const copy = map(nullptr, pages.bytes, PROT_READ | PROT_WRITE);
        memcpy(copy, original, size_t(pages.bytes));
        const size_t size = size_t(pages.bytes);
        if (mremap(copy, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, wanted) != wanted) give_up("mremap");
        pages_.push_back(pages);
    }

    void send_changes(Word at, const char* was) {
        const char* const is = reinterpret_cast<char*>(at);
        const auto differs = [&](Word i) { return i < PAGE && memcmp(is + i, was + i, sizeof(Word)); };
        for (Word i = 0; i < PAGE; i += sizeof(Word)) {
            if (!differs(i)) continue;
            const Word first = i;
            while (differs(i)) i += sizeof(Word);
            const Word change[] = {CHANGED, at + first, i - first};
            send(change, sizeof change);
            send(is + first, size_t(i - first));
        }
    }
};

Mirror mirror;

void on_fault(int, siginfo_t* info, void*) { mirror.fetch(reinterpret_cast<Word>(info->si_addr)); }

void find(void* library) {
    const Word length = receive_word();
    std::vector<char> name(size_t(length + 1));
    receive(name.data(), size_t(length));
    void* const at = dlsym(library, name.data());
    const Word found = at ? *static_cast<Word*>(at) : 0;  // the library has a pointer to each function
    send(&found, sizeof found);
}

void call() {
    const auto function = reinterpret_cast<void (*)(const Word*)>(receive_word());
    const Word count = receive_word();
    std::vector<Word> arguments(static_cast<size_t>(count));
    receive(arguments.data(), arguments.size() * sizeof(Word));
    function(arguments.data());
    mirror.give_back();
    const Word done = DONE;
    send(&done, sizeof done);
}

}  // namespace

int main(int, char** arguments) {
    void* const library = dlopen(arguments[1], RTLD_NOW);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        return 3;
    }
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGSEGV, &action, nullptr);
    for (;;) receive_word() == FIND ? find(library) : call();
}
