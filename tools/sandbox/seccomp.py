"""The system call filter of namespace sandboxes, as a classic BPF program.

Refused (EPERM) is what allocates kernel memory that no limit of the sandbox sees, what widens the kernel's surface, and
what reaches into other processes without need. The list is short on purpose: the namespaces isolate, this closes gaps.
"""

from __future__ import annotations

import errno
import functools
import platform
import struct

_LOAD, _JUMP_EQUAL, _JUMP_ABOVE, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCHITECTURE, _ARGUMENT_0 = 0, 4, 16
_NEW_NAMESPACES = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET."""

# name: (x86_64, aarch64)
_REFUSED = {
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsmount": (432, 432),
    "mount_setattr": (442, 442),
    "setns": (308, 268),
    "unshare": (272, 97),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "kexec_load": (246, 104),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "quotactl": (179, 60),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "vmsplice": (278, 75),
}
_CLONE = (56, 220)
_CLONE3 = (435, 435)
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


@functools.cache
def filter_program() -> bytes | None:
    """The program for ``bwrap --seccomp``; None on processors that it was not written for."""
    if platform.machine() not in _MACHINES:
        return None
    column, architecture = _MACHINES[platform.machine()]
    code: list[bytes] = [
        _instruction(_LOAD, _ARCHITECTURE),
        _instruction(_JUMP_EQUAL, architecture, 1, 0),
        _instruction(_RETURN, _KILL),  # 32-bit system calls have other numbers
        _instruction(_LOAD, _NUMBER),
    ]
    if column == 0:
        code += [_instruction(_JUMP_ABOVE, 0x40000000, 0, 1), _instruction(_RETURN, _ERRNO | errno.ENOSYS)]  # x32
    for numbers in _REFUSED.values():
        code += [_instruction(_JUMP_EQUAL, numbers[column], 0, 1), _instruction(_RETURN, _ERRNO | errno.EPERM)]
    # The flags of clone3 are in memory, where a filter cannot look; the C library falls back to clone.
    code += [_instruction(_JUMP_EQUAL, _CLONE3[column], 0, 1), _instruction(_RETURN, _ERRNO | errno.ENOSYS)]
    code += [
        _instruction(_JUMP_EQUAL, _CLONE[column], 0, 3),
        _instruction(_LOAD, _ARGUMENT_0),
        _instruction(_JUMP_SET, _NEW_NAMESPACES, 0, 1),
        _instruction(_RETURN, _ERRNO | errno.EPERM),
        _instruction(_RETURN, _ALLOW),
    ]
    return b"".join(code)


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
