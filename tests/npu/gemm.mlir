%tile_0_1 = aie.tile(0, 1)
%A_0_0_1 = aie.buffer(%tile_0_1) {sym_name = "A_0_0_1", address = 0 : i32} : memref<32xi32>
%A_1_0_1 = aie.buffer(%tile_0_1) {sym_name = "A_1_0_1", address = 128 : i32} : memref<32xi32>
%B_0_0_1 = aie.buffer(%tile_0_1) {sym_name = "B_0_0_1", address = 256 : i32} : memref<64xi32>
%B_1_0_1 = aie.buffer(%tile_0_1) {sym_name = "B_1_0_1", address = 512 : i32} : memref<64xi32>
%C0_0_0_1 = aie.buffer(%tile_0_1) {sym_name = "C0_0_0_1", address = 768 : i32} : memref<32xi32>
%C0_1_0_1 = aie.buffer(%tile_0_1) {sym_name = "C0_1_0_1", address = 896 : i32} : memref<32xi32>
%C1_0_0_1 = aie.buffer(%tile_0_1) {sym_name = "C1_0_0_1", address = 1024 : i32} : memref<32xi32>
%C1_1_0_1 = aie.buffer(%tile_0_1) {sym_name = "C1_1_0_1", address = 1152 : i32} : memref<32xi32>
%C2_0_0_1 = aie.buffer(%tile_0_1) {sym_name = "C2_0_0_1", address = 1280 : i32} : memref<32xi32>
%C2_1_0_1 = aie.buffer(%tile_0_1) {sym_name = "C2_1_0_1", address = 1408 : i32} : memref<32xi32>
%C3_0_0_1 = aie.buffer(%tile_0_1) {sym_name = "C3_0_0_1", address = 1536 : i32} : memref<32xi32>
%C3_1_0_1 = aie.buffer(%tile_0_1) {sym_name = "C3_1_0_1", address = 1664 : i32} : memref<32xi32>
%lock_0_1_0 = aie.lock(%tile_0_1, 0) {init = 2 : i32}
%lock_0_1_1 = aie.lock(%tile_0_1, 1) {init = 0 : i32}
%lock_0_1_2 = aie.lock(%tile_0_1, 2) {init = 2 : i32}
%lock_0_1_3 = aie.lock(%tile_0_1, 3) {init = 0 : i32}
%lock_0_1_4 = aie.lock(%tile_0_1, 4) {init = 2 : i32}
%lock_0_1_5 = aie.lock(%tile_0_1, 5) {init = 0 : i32}
%lock_0_1_6 = aie.lock(%tile_0_1, 6) {init = 2 : i32}
%lock_0_1_7 = aie.lock(%tile_0_1, 7) {init = 0 : i32}
%lock_0_1_8 = aie.lock(%tile_0_1, 8) {init = 2 : i32}
%lock_0_1_9 = aie.lock(%tile_0_1, 9) {init = 0 : i32}
%lock_0_1_10 = aie.lock(%tile_0_1, 10) {init = 2 : i32}
%lock_0_1_11 = aie.lock(%tile_0_1, 11) {init = 0 : i32}
%dma_0_1 = aie.memtile_dma(%tile_0_1) {
  %value1 = arith.constant 1 : i32
  %0 = aie.dma_start(S2MM, 0, ^bd0, ^channel1)
^bd0:
  aie.use_lock(%lock_0_1_0, AcquireGreaterEqual, %value1)
  aie.dma_bd(%A_0_0_1 : memref<32xi32> offset = 0 len = 32) {bd_id = 0 : i32}
  aie.use_lock(%lock_0_1_1, Release, %value1)
  aie.next_bd ^bd1
^bd1:
  aie.use_lock(%lock_0_1_0, AcquireGreaterEqual, %value1)
  aie.dma_bd(%A_1_0_1 : memref<32xi32> offset = 0 len = 32) {bd_id = 1 : i32}
  aie.use_lock(%lock_0_1_1, Release, %value1)
  aie.next_bd ^bd0
^channel1:
  %1 = aie.dma_start(MM2S, 0, ^bd2, ^channel2)
^bd2:
  aie.use_lock(%lock_0_1_1, AcquireGreaterEqual, %value1)
  aie.dma_bd(%A_0_0_1 : memref<32xi32> offset = 0 len = 32 sizes = [2, 2, 4, 2] strides = [16, 2, 4, 1]) {bd_id = 2 : i32}
  aie.use_lock(%lock_0_1_0, Release, %value1)
  aie.next_bd ^bd3
^bd3:
  aie.use_lock(%lock_0_1_1, AcquireGreaterEqual, %value1)
  aie.dma_bd(%A_1_0_1 : memref<32xi32> offset = 0 len = 32 sizes = [2, 2, 4, 2] strides = [16, 2, 4, 1]) {bd_id = 3 : i32}
  aie.use_lock(%lock_0_1_0, Release, %value1)
  aie.next_bd ^bd2
^channel2:
  %2 = aie.dma_start(S2MM, 1, ^bd24, ^channel3)
^bd24:
  aie.use_lock(%lock_0_1_2, AcquireGreaterEqual, %value1)
  aie.dma_bd(%B_0_0_1 : memref<64xi32> offset = 0 len = 64) {bd_id = 24 : i32}
  aie.use_lock(%lock_0_1_3, Release, %value1)
  aie.next_bd ^bd25
^bd25:
  aie.use_lock(%lock_0_1_2, AcquireGreaterEqual, %value1)
  aie.dma_bd(%B_1_0_1 : memref<64xi32> offset = 0 len = 64) {bd_id = 25 : i32}
  aie.use_lock(%lock_0_1_3, Release, %value1)
  aie.next_bd ^bd24
^channel3:
  %3 = aie.dma_start(MM2S, 1, ^bd26, ^channel4)
^bd26:
  aie.use_lock(%lock_0_1_3, AcquireGreaterEqual, %value1)
  aie.dma_bd(%B_0_0_1 : memref<64xi32> offset = 0 len = 64 sizes = [2, 2, 8, 2] strides = [32, 2, 4, 1]) {bd_id = 26 : i32}
  aie.use_lock(%lock_0_1_2, Release, %value1)
  aie.next_bd ^bd27
^bd27:
  aie.use_lock(%lock_0_1_3, AcquireGreaterEqual, %value1)
  aie.dma_bd(%B_1_0_1 : memref<64xi32> offset = 0 len = 64 sizes = [2, 2, 8, 2] strides = [32, 2, 4, 1]) {bd_id = 27 : i32}
  aie.use_lock(%lock_0_1_2, Release, %value1)
  aie.next_bd ^bd26
^channel4:
  %4 = aie.dma_start(S2MM, 2, ^bd4, ^channel5)
^bd4:
  aie.use_lock(%lock_0_1_4, AcquireGreaterEqual, %value1)
  aie.dma_bd(%C0_0_0_1 : memref<32xi32> offset = 0 len = 32) {bd_id = 4 : i32}
  aie.use_lock(%lock_0_1_5, Release, %value1)
  aie.next_bd ^bd5
^bd5:
  aie.use_lock(%lock_0_1_4, AcquireGreaterEqual, %value1)
  aie.dma_bd(%C0_1_0_1 : memref<32xi32> offset = 0 len = 32) {bd_id = 5 : i32}
  aie.use_lock(%lock_0_1_5, Release, %value1)
  aie.next_bd ^bd4
^channel5:
  %5 = aie.dma_start(S2MM, 3, ^bd28, ^channel6)
^bd28:
  aie.use_lock(%lock_0_1_6, AcquireGreaterEqual, %value1)
  aie.dma_bd(%C1_0_0_1 : memref<32xi32> offset = 0 len = 32) {bd_id = 28 : i32}
  aie.use_lock(%lock_0_1_7, Release, %value1)
  aie.next_bd ^bd29
^bd29:
  aie.use_lock(%lock_0_1_6, AcquireGreaterEqual, %value1)
  aie.dma_bd(%C1_1_0_1 : memref<32xi32> offset = 0 len = 32) {bd_id = 29 : i32}
  aie.use_lock(%lock_0_1_7, Release, %value1)
  aie.next_bd ^bd28
^channel6:
  %6 = aie.dma_start(S2MM, 4, ^bd6, ^channel7)
^bd6:
  aie.use_lock(%lock_0_1_8, AcquireGreaterEqual, %value1)
  aie.dma_bd(%C2_0_0_1 : memref<32xi32> offset = 0 len = 32) {bd_id = 6 : i32}
  aie.use_lock(%lock_0_1_9, Release, %value1)
  aie.next_bd ^bd7
^bd7:
  aie.use_lock(%lock_0_1_8, AcquireGreaterEqual, %value1)
  aie.dma_bd(%C2_1_0_1 : memref<32xi32> offset = 0 len = 32) {bd_id = 7 : i32}
  aie.use_lock(%lock_0_1_9, Release, %value1)
  aie.next_bd ^bd6
^channel7:
  %7 = aie.dma_start(S2MM, 5, ^bd30, ^channel8)
^bd30:
  aie.use_lock(%lock_0_1_10, AcquireGreaterEqual, %value1)
  aie.dma_bd(%C3_0_0_1 : memref<32xi32> offset = 0 len = 32) {bd_id = 30 : i32}
  aie.use_lock(%lock_0_1_11, Release, %value1)
  aie.next_bd ^bd31
^bd31:
  aie.use_lock(%lock_0_1_10, AcquireGreaterEqual, %value1)
  aie.dma_bd(%C3_1_0_1 : memref<32xi32> offset = 0 len = 32) {bd_id = 31 : i32}
  aie.use_lock(%lock_0_1_11, Release, %value1)
  aie.next_bd ^bd30
^channel8:
  %8 = aie.dma_start(MM2S, 2, ^bd8, ^end)
^bd8:
  aie.use_lock(%lock_0_1_5, AcquireGreaterEqual, %value1)
  aie.dma_bd(%C0_0_0_1 : memref<32xi32> offset = 0 len = 32 sizes = [2, 4, 2, 2] strides = [16, 2, 8, 1]) {bd_id = 8 : i32}
  aie.use_lock(%lock_0_1_4, Release, %value1)
  aie.next_bd ^bd9
^bd9:
  aie.use_lock(%lock_0_1_7, AcquireGreaterEqual, %value1)
  aie.dma_bd(%C1_0_0_1 : memref<32xi32> offset = 0 len = 32 sizes = [2, 4, 2, 2] strides = [16, 2, 8, 1]) {bd_id = 9 : i32}
  aie.use_lock(%lock_0_1_6, Release, %value1)
  aie.next_bd ^bd10
^bd10:
  aie.use_lock(%lock_0_1_9, AcquireGreaterEqual, %value1)
  aie.dma_bd(%C2_0_0_1 : memref<32xi32> offset = 0 len = 32 sizes = [2, 4, 2, 2] strides = [16, 2, 8, 1]) {bd_id = 10 : i32}
  aie.use_lock(%lock_0_1_8, Release, %value1)
  aie.next_bd ^bd11
^bd11:
  aie.use_lock(%lock_0_1_11, AcquireGreaterEqual, %value1)
  aie.dma_bd(%C3_0_0_1 : memref<32xi32> offset = 0 len = 32 sizes = [2, 4, 2, 2] strides = [16, 2, 8, 1]) {bd_id = 11 : i32}
  aie.use_lock(%lock_0_1_10, Release, %value1)
  aie.next_bd ^bd12
^bd12:
  aie.use_lock(%lock_0_1_5, AcquireGreaterEqual, %value1)
  aie.dma_bd(%C0_1_0_1 : memref<32xi32> offset = 0 len = 32 sizes = [2, 4, 2, 2] strides = [16, 2, 8, 1]) {bd_id = 12 : i32}
  aie.use_lock(%lock_0_1_4, Release, %value1)
  aie.next_bd ^bd13
^bd13:
  aie.use_lock(%lock_0_1_7, AcquireGreaterEqual, %value1)
  aie.dma_bd(%C1_1_0_1 : memref<32xi32> offset = 0 len = 32 sizes = [2, 4, 2, 2] strides = [16, 2, 8, 1]) {bd_id = 13 : i32}
  aie.use_lock(%lock_0_1_6, Release, %value1)
  aie.next_bd ^bd14
^bd14:
  aie.use_lock(%lock_0_1_9, AcquireGreaterEqual, %value1)
  aie.dma_bd(%C2_1_0_1 : memref<32xi32> offset = 0 len = 32 sizes = [2, 4, 2, 2] strides = [16, 2, 8, 1]) {bd_id = 14 : i32}
  aie.use_lock(%lock_0_1_8, Release, %value1)
  aie.next_bd ^bd15
^bd15:
  aie.use_lock(%lock_0_1_11, AcquireGreaterEqual, %value1)
  aie.dma_bd(%C3_1_0_1 : memref<32xi32> offset = 0 len = 32 sizes = [2, 4, 2, 2] strides = [16, 2, 8, 1]) {bd_id = 15 : i32}
  aie.use_lock(%lock_0_1_10, Release, %value1)
  aie.next_bd ^bd8
^end:
  aie.end
}
%tile_3_5 = aie.tile(3, 5)
%parameters_3_5 = aie.buffer(%tile_3_5) {sym_name = "parameters_3_5", address = 3328 : i32} : memref<16xi32>
%A_0_3_5 = aie.buffer(%tile_3_5) {sym_name = "A_0_3_5", address = 3392 : i32} : memref<32xi32>
%A_1_3_5 = aie.buffer(%tile_3_5) {sym_name = "A_1_3_5", address = 3520 : i32} : memref<32xi32>
%B_0_3_5 = aie.buffer(%tile_3_5) {sym_name = "B_0_3_5", address = 3648 : i32} : memref<64xi32>
%B_1_3_5 = aie.buffer(%tile_3_5) {sym_name = "B_1_3_5", address = 3904 : i32} : memref<64xi32>
%C_0_3_5 = aie.buffer(%tile_3_5) {sym_name = "C_0_3_5", address = 4160 : i32} : memref<32xi32>
%C_1_3_5 = aie.buffer(%tile_3_5) {sym_name = "C_1_3_5", address = 4288 : i32} : memref<32xi32>
%accumulator_3_5 = aie.buffer(%tile_3_5) {sym_name = "accumulator_3_5", address = 4416 : i32} : memref<128xi32>
%lock_3_5_0 = aie.lock(%tile_3_5, 0) {init = 2 : i32}
%lock_3_5_1 = aie.lock(%tile_3_5, 1) {init = 0 : i32}
%lock_3_5_2 = aie.lock(%tile_3_5, 2) {init = 2 : i32}
%lock_3_5_3 = aie.lock(%tile_3_5, 3) {init = 0 : i32}
%lock_3_5_4 = aie.lock(%tile_3_5, 4) {init = 2 : i32}
%lock_3_5_5 = aie.lock(%tile_3_5, 5) {init = 0 : i32}
%dma_3_5 = aie.mem(%tile_3_5) {
  %value1 = arith.constant 1 : i32
  %0 = aie.dma_start(S2MM, 0, ^bd0, ^channel1)
^bd0:
  aie.use_lock(%lock_3_5_0, AcquireGreaterEqual, %value1)
  aie.dma_bd(%A_0_3_5 : memref<32xi32> offset = 0 len = 32) {bd_id = 0 : i32}
  aie.use_lock(%lock_3_5_1, Release, %value1)
  aie.next_bd ^bd1
^bd1:
  aie.use_lock(%lock_3_5_0, AcquireGreaterEqual, %value1)
  aie.dma_bd(%A_1_3_5 : memref<32xi32> offset = 0 len = 32) {bd_id = 1 : i32}
  aie.use_lock(%lock_3_5_1, Release, %value1)
  aie.next_bd ^bd0
^channel1:
  %1 = aie.dma_start(S2MM, 1, ^bd2, ^channel2)
^bd2:
  aie.use_lock(%lock_3_5_2, AcquireGreaterEqual, %value1)
  aie.dma_bd(%B_0_3_5 : memref<64xi32> offset = 0 len = 64) {bd_id = 2 : i32}
  aie.use_lock(%lock_3_5_3, Release, %value1)
  aie.next_bd ^bd3
^bd3:
  aie.use_lock(%lock_3_5_2, AcquireGreaterEqual, %value1)
  aie.dma_bd(%B_1_3_5 : memref<64xi32> offset = 0 len = 64) {bd_id = 3 : i32}
  aie.use_lock(%lock_3_5_3, Release, %value1)
  aie.next_bd ^bd2
^channel2:
  %2 = aie.dma_start(MM2S, 0, ^bd4, ^end)
^bd4:
  aie.use_lock(%lock_3_5_5, AcquireGreaterEqual, %value1)
  aie.dma_bd(%C_0_3_5 : memref<32xi32> offset = 0 len = 32) {bd_id = 4 : i32}
  aie.use_lock(%lock_3_5_4, Release, %value1)
  aie.next_bd ^bd5
^bd5:
  aie.use_lock(%lock_3_5_5, AcquireGreaterEqual, %value1)
  aie.dma_bd(%C_1_3_5 : memref<32xi32> offset = 0 len = 32) {bd_id = 5 : i32}
  aie.use_lock(%lock_3_5_4, Release, %value1)
  aie.next_bd ^bd4
^end:
  aie.end
}
%core_3_5 = aie.core(%tile_3_5) {
  %value1 = arith.constant 1 : i32
  %zero = arith.constant 0 : index
  %one = arith.constant 1 : index
  %ever = arith.constant 4294967295 : index
  %first = arith.constant false
  %flip = arith.constant true
  %through:2 = scf.for %turn = %zero to %ever step %one iter_args(%odd_input = %first, %odd_output = %first) -> (i1, i1) {
    %c = arith.select %odd_output, %C_1_3_5, %C_0_3_5 : memref<32xi32>
    aie.use_lock(%lock_3_5_1, AcquireGreaterEqual, %value1)
    aie.use_lock(%lock_3_5_3, AcquireGreaterEqual, %value1)
    aie.use_lock(%lock_3_5_4, AcquireGreaterEqual, %value1)
    %word = memref.load %parameters_3_5[%zero] : memref<16xi32>
    %depth = arith.index_cast %word : i32 to index
    func.call @zero(%accumulator_3_5) : (memref<128xi32>) -> ()
    %a_at_odd_input = arith.select %odd_input, %A_1_3_5, %A_0_3_5 : memref<32xi32>
    %b_at_odd_input = arith.select %odd_input, %B_1_3_5, %B_0_3_5 : memref<64xi32>
    func.call @multiply(%a_at_odd_input, %b_at_odd_input, %accumulator_3_5) : (memref<32xi32>, memref<64xi32>, memref<128xi32>) -> ()
    aie.use_lock(%lock_3_5_0, Release, %value1)
    aie.use_lock(%lock_3_5_2, Release, %value1)
    %next = arith.xori %odd_input, %flip : i1
    %last = scf.for %i = %one to %depth step %one iter_args(%odd = %next) -> (i1) {
      aie.use_lock(%lock_3_5_1, AcquireGreaterEqual, %value1)
      aie.use_lock(%lock_3_5_3, AcquireGreaterEqual, %value1)
      %a_at_odd = arith.select %odd, %A_1_3_5, %A_0_3_5 : memref<32xi32>
      %b_at_odd = arith.select %odd, %B_1_3_5, %B_0_3_5 : memref<64xi32>
      func.call @multiply(%a_at_odd, %b_at_odd, %accumulator_3_5) : (memref<32xi32>, memref<64xi32>, memref<128xi32>) -> ()
      aie.use_lock(%lock_3_5_0, Release, %value1)
      aie.use_lock(%lock_3_5_2, Release, %value1)
      %other = arith.xori %odd, %flip : i1
      scf.yield %other : i1
    }
    %shift = memref.load %parameters_3_5[%one] : memref<16xi32>
    func.call @store_half_even(%accumulator_3_5, %c, %shift) : (memref<128xi32>, memref<32xi32>, i32) -> ()
    aie.use_lock(%lock_3_5_5, Release, %value1)
    %done = arith.xori %odd_output, %flip : i1
    scf.yield %last, %done : i1, i1
  }
  aie.end
} {stack_size = 3328 : i32}
aie.runtime_sequence(%A: memref<1920xi32>, %B: memref<1536xi32>, %C: memref<5120xi32>) {
  // C of 150 x 120, 48 deep, shift 6
  %p3 = arith.constant 3 : i32
  %p6 = arith.constant 6 : i32
  aiex.npu.rtp_write(@parameters_0_2, 0, %p3) : i32
  aiex.npu.rtp_write(@parameters_0_2, 1, %p6) : i32
  aiex.npu.rtp_write(@parameters_0_3, 0, %p3) : i32
  aiex.npu.rtp_write(@parameters_0_3, 1, %p6) : i32
  aiex.npu.rtp_write(@parameters_0_4, 0, %p3) : i32
  aiex.npu.rtp_write(@parameters_0_4, 1, %p6) : i32
  aiex.npu.rtp_write(@parameters_0_5, 0, %p3) : i32
  aiex.npu.rtp_write(@parameters_0_5, 1, %p6) : i32
  aiex.npu.rtp_write(@parameters_1_2, 0, %p3) : i32
  aiex.npu.rtp_write(@parameters_1_2, 1, %p6) : i32
  aiex.npu.rtp_write(@parameters_1_3, 0, %p3) : i32
  aiex.npu.rtp_write(@parameters_1_3, 1, %p6) : i32
  aiex.npu.rtp_write(@parameters_1_4, 0, %p3) : i32
  aiex.npu.rtp_write(@parameters_1_4, 1, %p6) : i32
  aiex.npu.rtp_write(@parameters_1_5, 0, %p3) : i32
  aiex.npu.rtp_write(@parameters_1_5, 1, %p6) : i32
  aiex.npu.rtp_write(@parameters_2_2, 0, %p3) : i32
  aiex.npu.rtp_write(@parameters_2_2, 1, %p6) : i32
  aiex.npu.rtp_write(@parameters_2_3, 0, %p3) : i32
  aiex.npu.rtp_write(@parameters_2_3, 1, %p6) : i32
  aiex.npu.rtp_write(@parameters_2_4, 0, %p3) : i32
  aiex.npu.rtp_write(@parameters_2_4, 1, %p6) : i32
  aiex.npu.rtp_write(@parameters_2_5, 0, %p3) : i32
  aiex.npu.rtp_write(@parameters_2_5, 1, %p6) : i32
  aiex.npu.rtp_write(@parameters_3_2, 0, %p3) : i32
  aiex.npu.rtp_write(@parameters_3_2, 1, %p6) : i32
  aiex.npu.rtp_write(@parameters_3_3, 0, %p3) : i32
  aiex.npu.rtp_write(@parameters_3_3, 1, %p6) : i32
  aiex.npu.rtp_write(@parameters_3_4, 0, %p3) : i32
  aiex.npu.rtp_write(@parameters_3_4, 1, %p6) : i32
  aiex.npu.rtp_write(@parameters_3_5, 0, %p3) : i32
  aiex.npu.rtp_write(@parameters_3_5, 1, %p6) : i32
  %task35 = aiex.dma_configure_task(%tile_0_0, S2MM, 0) {
    aie.dma_bd(%C : memref<5120xi32> offset = 0 len = 128 sizes = [2, 1, 32, 4] strides = [16, 0, 32, 1]) {bd_id = 2 : i32}
    aie.end
  } {issue_token = true, repeat_count = 1 : i32}
  aiex.dma_start_task(%task35)
  %task36 = aiex.dma_configure_task(%tile_0_0, MM2S, 0) {
    aie.dma_bd(%A : memref<1920xi32> offset = 0 len = 96 sizes = [1, 1, 1, 96] strides = [0, 0, 0, 1]) {bd_id = 0 : i32}
    aie.end
  } {repeat_count = 1 : i32}
  aiex.dma_start_task(%task36)
  %task37 = aiex.dma_configure_task(%tile_0_0, MM2S, 1) {
    aie.dma_bd(%B : memref<1536xi32> offset = 0 len = 384 sizes = [1, 1, 1, 384] strides = [0, 0, 0, 1]) {bd_id = 1 : i32}
    aie.end
  } {repeat_count = 0 : i32}
  aiex.dma_start_task(%task37)
  %task41 = aiex.dma_configure_task(%tile_1_0, S2MM, 0) {
    aie.dma_bd(%C : memref<5120xi32> offset = 4 len = 128 sizes = [2, 1, 32, 4] strides = [16, 0, 32, 1]) {bd_id = 2 : i32}
    aie.end
  } {issue_token = true, repeat_count = 1 : i32}
  aiex.dma_start_task(%task41)
  %task42 = aiex.dma_configure_task(%tile_1_0, MM2S, 0) {
    aie.dma_bd(%A : memref<1920xi32> offset = 96 len = 96 sizes = [1, 1, 1, 96] strides = [0, 0, 0, 1]) {bd_id = 0 : i32}
    aie.end
  } {repeat_count = 1 : i32}
  aiex.dma_start_task(%task42)
  %task43 = aiex.dma_configure_task(%tile_1_0, MM2S, 1) {
    aie.dma_bd(%B : memref<1536xi32> offset = 384 len = 384 sizes = [1, 1, 1, 384] strides = [0, 0, 0, 1]) {bd_id = 1 : i32}
    aie.end
  } {repeat_count = 0 : i32}
  aiex.dma_start_task(%task43)
  %task47 = aiex.dma_configure_task(%tile_2_0, S2MM, 0) {
    aie.dma_bd(%C : memref<5120xi32> offset = 8 len = 128 sizes = [2, 1, 32, 4] strides = [16, 0, 32, 1]) {bd_id = 2 : i32}
    aie.end
  } {issue_token = true, repeat_count = 1 : i32}
  aiex.dma_start_task(%task47)
  %task48 = aiex.dma_configure_task(%tile_2_0, MM2S, 0) {
    aie.dma_bd(%A : memref<1920xi32> offset = 192 len = 96 sizes = [1, 1, 1, 96] strides = [0, 0, 0, 1]) {bd_id = 0 : i32}
    aie.end
  } {repeat_count = 1 : i32}
  aiex.dma_start_task(%task48)
  %task49 = aiex.dma_configure_task(%tile_2_0, MM2S, 1) {
    aie.dma_bd(%B : memref<1536xi32> offset = 768 len = 384 sizes = [1, 1, 1, 384] strides = [0, 0, 0, 1]) {bd_id = 1 : i32}
    aie.end
  } {repeat_count = 0 : i32}
  aiex.dma_start_task(%task49)
  %task53 = aiex.dma_configure_task(%tile_3_0, S2MM, 0) {
    aie.dma_bd(%C : memref<5120xi32> offset = 12 len = 128 sizes = [2, 1, 32, 4] strides = [16, 0, 32, 1]) {bd_id = 2 : i32}
    aie.end
  } {issue_token = true, repeat_count = 1 : i32}
  aiex.dma_start_task(%task53)
  %task54 = aiex.dma_configure_task(%tile_3_0, MM2S, 0) {
    aie.dma_bd(%A : memref<1920xi32> offset = 288 len = 96 sizes = [1, 1, 1, 96] strides = [0, 0, 0, 1]) {bd_id = 0 : i32}
    aie.end
  } {repeat_count = 1 : i32}
  aiex.dma_start_task(%task54)
  %task55 = aiex.dma_configure_task(%tile_3_0, MM2S, 1) {
    aie.dma_bd(%B : memref<1536xi32> offset = 1152 len = 384 sizes = [1, 1, 1, 384] strides = [0, 0, 0, 1]) {bd_id = 1 : i32}
    aie.end
  } {repeat_count = 0 : i32}
  aiex.dma_start_task(%task55)
  %task59 = aiex.dma_configure_task(%tile_0_0, S2MM, 0) {
    aie.dma_bd(%C : memref<5120xi32> offset = 1024 len = 128 sizes = [2, 1, 32, 4] strides = [16, 0, 32, 1]) {bd_id = 5 : i32}
    aie.end
  } {issue_token = true, repeat_count = 1 : i32}
  aiex.dma_start_task(%task59)
  %task60 = aiex.dma_configure_task(%tile_0_0, MM2S, 0) {
    aie.dma_bd(%A : memref<1920xi32> offset = 384 len = 96 sizes = [1, 1, 1, 96] strides = [0, 0, 0, 1]) {bd_id = 3 : i32}
    aie.end
  } {repeat_count = 1 : i32}
  aiex.dma_start_task(%task60)
  %task61 = aiex.dma_configure_task(%tile_0_0, MM2S, 1) {
    aie.dma_bd(%B : memref<1536xi32> offset = 0 len = 384 sizes = [1, 1, 1, 384] strides = [0, 0, 0, 1]) {bd_id = 4 : i32}
    aie.end
  } {repeat_count = 0 : i32}
  aiex.dma_start_task(%task61)
  %task65 = aiex.dma_configure_task(%tile_1_0, S2MM, 0) {
    aie.dma_bd(%C : memref<5120xi32> offset = 1028 len = 128 sizes = [2, 1, 32, 4] strides = [16, 0, 32, 1]) {bd_id = 5 : i32}
    aie.end
  } {issue_token = true, repeat_count = 1 : i32}
  aiex.dma_start_task(%task65)
  %task66 = aiex.dma_configure_task(%tile_1_0, MM2S, 0) {
    aie.dma_bd(%A : memref<1920xi32> offset = 480 len = 96 sizes = [1, 1, 1, 96] strides = [0, 0, 0, 1]) {bd_id = 3 : i32}
    aie.end
  } {repeat_count = 1 : i32}
  aiex.dma_start_task(%task66)
  %task67 = aiex.dma_configure_task(%tile_1_0, MM2S, 1) {
    aie.dma_bd(%B : memref<1536xi32> offset = 384 len = 384 sizes = [1, 1, 1, 384] strides = [0, 0, 0, 1]) {bd_id = 4 : i32}
    aie.end
  } {repeat_count = 0 : i32}
  aiex.dma_start_task(%task67)
  %task71 = aiex.dma_configure_task(%tile_2_0, S2MM, 0) {
    aie.dma_bd(%C : memref<5120xi32> offset = 1032 len = 128 sizes = [2, 1, 32, 4] strides = [16, 0, 32, 1]) {bd_id = 5 : i32}
    aie.end
  } {issue_token = true, repeat_count = 1 : i32}
  aiex.dma_start_task(%task71)
  %task72 = aiex.dma_configure_task(%tile_2_0, MM2S, 0) {
    aie.dma_bd(%A : memref<1920xi32> offset = 576 len = 96 sizes = [1, 1, 1, 96] strides = [0, 0, 0, 1]) {bd_id = 3 : i32}
    aie.end
  } {repeat_count = 1 : i32}
  aiex.dma_start_task(%task72)
  %task73 = aiex.dma_configure_task(%tile_2_0, MM2S, 1) {
    aie.dma_bd(%B : memref<1536xi32> offset = 768 len = 384 sizes = [1, 1, 1, 384] strides = [0, 0, 0, 1]) {bd_id = 4 : i32}
    aie.end
  } {repeat_count = 0 : i32}
  aiex.dma_start_task(%task73)
  %task77 = aiex.dma_configure_task(%tile_3_0, S2MM, 0) {
    aie.dma_bd(%C : memref<5120xi32> offset = 1036 len = 128 sizes = [2, 1, 32, 4] strides = [16, 0, 32, 1]) {bd_id = 5 : i32}
    aie.end
  } {issue_token = true, repeat_count = 1 : i32}
  aiex.dma_start_task(%task77)
  %task78 = aiex.dma_configure_task(%tile_3_0, MM2S, 0) {
    aie.dma_bd(%A : memref<1920xi32> offset = 672 len = 96 sizes = [1, 1, 1, 96] strides = [0, 0, 0, 1]) {bd_id = 3 : i32}
    aie.end
  } {repeat_count = 1 : i32}
  aiex.dma_start_task(%task78)
  %task79 = aiex.dma_configure_task(%tile_3_0, MM2S, 1) {
    aie.dma_bd(%B : memref<1536xi32> offset = 1152 len = 384 sizes = [1, 1, 1, 384] strides = [0, 0, 0, 1]) {bd_id = 4 : i32}
    aie.end
  } {repeat_count = 0 : i32}
  aiex.dma_start_task(%task79)
  %task83 = aiex.dma_configure_task(%tile_0_0, S2MM, 0) {
    aie.dma_bd(%C : memref<5120xi32> offset = 2048 len = 128 sizes = [2, 1, 32, 4] strides = [16, 0, 32, 1]) {bd_id = 8 : i32}
    aie.end
  } {issue_token = true, repeat_count = 1 : i32}
  aiex.dma_start_task(%task83)
  %task84 = aiex.dma_configure_task(%tile_0_0, MM2S, 0) {
    aie.dma_bd(%A : memref<1920xi32> offset = 768 len = 96 sizes = [1, 1, 1, 96] strides = [0, 0, 0, 1]) {bd_id = 6 : i32}
    aie.end
  } {repeat_count = 1 : i32}
  aiex.dma_start_task(%task84)
  %task85 = aiex.dma_configure_task(%tile_0_0, MM2S, 1) {
    aie.dma_bd(%B : memref<1536xi32> offset = 0 len = 384 sizes = [1, 1, 1, 384] strides = [0, 0, 0, 1]) {bd_id = 7 : i32}
    aie.end
  } {repeat_count = 0 : i32}
  aiex.dma_start_task(%task85)
  %task89 = aiex.dma_configure_task(%tile_1_0, S2MM, 0) {
    aie.dma_bd(%C : memref<5120xi32> offset = 2052 len = 128 sizes = [2, 1, 32, 4] strides = [16, 0, 32, 1]) {bd_id = 8 : i32}
    aie.end
  } {issue_token = true, repeat_count = 1 : i32}
  aiex.dma_start_task(%task89)
  %task90 = aiex.dma_configure_task(%tile_1_0, MM2S, 0) {
    aie.dma_bd(%A : memref<1920xi32> offset = 864 len = 96 sizes = [1, 1, 1, 96] strides = [0, 0, 0, 1]) {bd_id = 6 : i32}
    aie.end
  } {repeat_count = 1 : i32}
  aiex.dma_start_task(%task90)
  %task91 = aiex.dma_configure_task(%tile_1_0, MM2S, 1) {
    aie.dma_bd(%B : memref<1536xi32> offset = 384 len = 384 sizes = [1, 1, 1, 384] strides = [0, 0, 0, 1]) {bd_id = 7 : i32}
    aie.end
  } {repeat_count = 0 : i32}
  aiex.dma_start_task(%task91)
  %task95 = aiex.dma_configure_task(%tile_2_0, S2MM, 0) {
    aie.dma_bd(%C : memref<5120xi32> offset = 2056 len = 128 sizes = [2, 1, 32, 4] strides = [16, 0, 32, 1]) {bd_id = 8 : i32}
    aie.end
  } {issue_token = true, repeat_count = 1 : i32}
  aiex.dma_start_task(%task95)
  %task96 = aiex.dma_configure_task(%tile_2_0, MM2S, 0) {
    aie.dma_bd(%A : memref<1920xi32> offset = 960 len = 96 sizes = [1, 1, 1, 96] strides = [0, 0, 0, 1]) {bd_id = 6 : i32}
    aie.end
  } {repeat_count = 1 : i32}
  aiex.dma_start_task(%task96)
  %task97 = aiex.dma_configure_task(%tile_2_0, MM2S, 1) {
    aie.dma_bd(%B : memref<1536xi32> offset = 768 len = 384 sizes = [1, 1, 1, 384] strides = [0, 0, 0, 1]) {bd_id = 7 : i32}
    aie.end
  } {repeat_count = 0 : i32}
  aiex.dma_start_task(%task97)
  %task101 = aiex.dma_configure_task(%tile_3_0, S2MM, 0) {
    aie.dma_bd(%C : memref<5120xi32> offset = 2060 len = 128 sizes = [2, 1, 32, 4] strides = [16, 0, 32, 1]) {bd_id = 8 : i32}
    aie.end
  } {issue_token = true, repeat_count = 1 : i32}
  aiex.dma_start_task(%task101)
  %task102 = aiex.dma_configure_task(%tile_3_0, MM2S, 0) {
    aie.dma_bd(%A : memref<1920xi32> offset = 1056 len = 96 sizes = [1, 1, 1, 96] strides = [0, 0, 0, 1]) {bd_id = 6 : i32}
    aie.end
  } {repeat_count = 1 : i32}
  aiex.dma_start_task(%task102)
  %task103 = aiex.dma_configure_task(%tile_3_0, MM2S, 1) {
    aie.dma_bd(%B : memref<1536xi32> offset = 1152 len = 384 sizes = [1, 1, 1, 384] strides = [0, 0, 0, 1]) {bd_id = 7 : i32}
    aie.end
  } {repeat_count = 0 : i32}
  aiex.dma_start_task(%task103)
  %task107 = aiex.dma_configure_task(%tile_0_0, S2MM, 0) {
    aie.dma_bd(%C : memref<5120xi32> offset = 3072 len = 128 sizes = [2, 1, 32, 4] strides = [16, 0, 32, 1]) {bd_id = 11 : i32}
    aie.end
  } {issue_token = true, repeat_count = 1 : i32}
  aiex.dma_start_task(%task107)
  %task108 = aiex.dma_configure_task(%tile_0_0, MM2S, 0) {
    aie.dma_bd(%A : memref<1920xi32> offset = 1152 len = 96 sizes = [1, 1, 1, 96] strides = [0, 0, 0, 1]) {bd_id = 9 : i32}
    aie.end
  } {repeat_count = 1 : i32}
  aiex.dma_start_task(%task108)
  %task109 = aiex.dma_configure_task(%tile_0_0, MM2S, 1) {
    aie.dma_bd(%B : memref<1536xi32> offset = 0 len = 384 sizes = [1, 1, 1, 384] strides = [0, 0, 0, 1]) {bd_id = 10 : i32}
    aie.end
  } {repeat_count = 0 : i32}
  aiex.dma_start_task(%task109)
  %task113 = aiex.dma_configure_task(%tile_1_0, S2MM, 0) {
    aie.dma_bd(%C : memref<5120xi32> offset = 3076 len = 128 sizes = [2, 1, 32, 4] strides = [16, 0, 32, 1]) {bd_id = 11 : i32}
    aie.end
  } {issue_token = true, repeat_count = 1 : i32}
  aiex.dma_start_task(%task113)
  %task114 = aiex.dma_configure_task(%tile_1_0, MM2S, 0) {
    aie.dma_bd(%A : memref<1920xi32> offset = 1248 len = 96 sizes = [1, 1, 1, 96] strides = [0, 0, 0, 1]) {bd_id = 9 : i32}
    aie.end
  } {repeat_count = 1 : i32}
  aiex.dma_start_task(%task114)
  %task115 = aiex.dma_configure_task(%tile_1_0, MM2S, 1) {
    aie.dma_bd(%B : memref<1536xi32> offset = 384 len = 384 sizes = [1, 1, 1, 384] strides = [0, 0, 0, 1]) {bd_id = 10 : i32}
    aie.end
  } {repeat_count = 0 : i32}
  aiex.dma_start_task(%task115)
  %task119 = aiex.dma_configure_task(%tile_2_0, S2MM, 0) {
    aie.dma_bd(%C : memref<5120xi32> offset = 3080 len = 128 sizes = [2, 1, 32, 4] strides = [16, 0, 32, 1]) {bd_id = 11 : i32}
    aie.end
  } {issue_token = true, repeat_count = 1 : i32}
  aiex.dma_start_task(%task119)
  %task120 = aiex.dma_configure_task(%tile_2_0, MM2S, 0) {
    aie.dma_bd(%A : memref<1920xi32> offset = 1344 len = 96 sizes = [1, 1, 1, 96] strides = [0, 0, 0, 1]) {bd_id = 9 : i32}
    aie.end
  } {repeat_count = 1 : i32}
  aiex.dma_start_task(%task120)
  %task121 = aiex.dma_configure_task(%tile_2_0, MM2S, 1) {
    aie.dma_bd(%B : memref<1536xi32> offset = 768 len = 384 sizes = [1, 1, 1, 384] strides = [0, 0, 0, 1]) {bd_id = 10 : i32}
    aie.end
  } {repeat_count = 0 : i32}
  aiex.dma_start_task(%task121)
  %task125 = aiex.dma_configure_task(%tile_3_0, S2MM, 0) {
    aie.dma_bd(%C : memref<5120xi32> offset = 3084 len = 128 sizes = [2, 1, 32, 4] strides = [16, 0, 32, 1]) {bd_id = 11 : i32}
    aie.end
  } {issue_token = true, repeat_count = 1 : i32}
  aiex.dma_start_task(%task125)
  %task126 = aiex.dma_configure_task(%tile_3_0, MM2S, 0) {
    aie.dma_bd(%A : memref<1920xi32> offset = 1440 len = 96 sizes = [1, 1, 1, 96] strides = [0, 0, 0, 1]) {bd_id = 9 : i32}
    aie.end
  } {repeat_count = 1 : i32}
  aiex.dma_start_task(%task126)
  %task127 = aiex.dma_configure_task(%tile_3_0, MM2S, 1) {
    aie.dma_bd(%B : memref<1536xi32> offset = 1152 len = 384 sizes = [1, 1, 1, 384] strides = [0, 0, 0, 1]) {bd_id = 10 : i32}
    aie.end
  } {repeat_count = 0 : i32}
  aiex.dma_start_task(%task127)
  aiex.dma_await_task(%task35)
  %task132 = aiex.dma_configure_task(%tile_0_0, S2MM, 0) {
    aie.dma_bd(%C : memref<5120xi32> offset = 4096 len = 128 sizes = [2, 1, 32, 4] strides = [16, 0, 32, 1]) {bd_id = 2 : i32}
    aie.end
  } {issue_token = true, repeat_count = 1 : i32}
  aiex.dma_start_task(%task132)
  aiex.dma_free_task(%task36)
  %task133 = aiex.dma_configure_task(%tile_0_0, MM2S, 0) {
    aie.dma_bd(%A : memref<1920xi32> offset = 1536 len = 96 sizes = [1, 1, 1, 96] strides = [0, 0, 0, 1]) {bd_id = 0 : i32}
    aie.end
  } {repeat_count = 1 : i32}
  aiex.dma_start_task(%task133)
  aiex.dma_free_task(%task37)
  %task134 = aiex.dma_configure_task(%tile_0_0, MM2S, 1) {
    aie.dma_bd(%B : memref<1536xi32> offset = 0 len = 384 sizes = [1, 1, 1, 384] strides = [0, 0, 0, 1]) {bd_id = 1 : i32}
    aie.end
  } {repeat_count = 0 : i32}
  aiex.dma_start_task(%task134)
  aiex.dma_await_task(%task41)
  %task139 = aiex.dma_configure_task(%tile_1_0, S2MM, 0) {
    aie.dma_bd(%C : memref<5120xi32> offset = 4100 len = 128 sizes = [2, 1, 32, 4] strides = [16, 0, 32, 1]) {bd_id = 2 : i32}
    aie.end
  } {issue_token = true, repeat_count = 1 : i32}
  aiex.dma_start_task(%task139)
  aiex.dma_free_task(%task42)
  %task140 = aiex.dma_configure_task(%tile_1_0, MM2S, 0) {
    aie.dma_bd(%A : memref<1920xi32> offset = 1632 len = 96 sizes = [1, 1, 1, 96] strides = [0, 0, 0, 1]) {bd_id = 0 : i32}
    aie.end
  } {repeat_count = 1 : i32}
  aiex.dma_start_task(%task140)
  aiex.dma_free_task(%task43)
  %task141 = aiex.dma_configure_task(%tile_1_0, MM2S, 1) {
    aie.dma_bd(%B : memref<1536xi32> offset = 384 len = 384 sizes = [1, 1, 1, 384] strides = [0, 0, 0, 1]) {bd_id = 1 : i32}
    aie.end
  } {repeat_count = 0 : i32}
  aiex.dma_start_task(%task141)
  aiex.dma_await_task(%task47)
  %task146 = aiex.dma_configure_task(%tile_2_0, S2MM, 0) {
    aie.dma_bd(%C : memref<5120xi32> offset = 4104 len = 128 sizes = [2, 1, 32, 4] strides = [16, 0, 32, 1]) {bd_id = 2 : i32}
    aie.end
  } {issue_token = true, repeat_count = 1 : i32}
  aiex.dma_start_task(%task146)
  aiex.dma_free_task(%task48)
  %task147 = aiex.dma_configure_task(%tile_2_0, MM2S, 0) {
    aie.dma_bd(%A : memref<1920xi32> offset = 1728 len = 96 sizes = [1, 1, 1, 96] strides = [0, 0, 0, 1]) {bd_id = 0 : i32}
    aie.end
  } {repeat_count = 1 : i32}
  aiex.dma_start_task(%task147)
  aiex.dma_free_task(%task49)
  %task148 = aiex.dma_configure_task(%tile_2_0, MM2S, 1) {
    aie.dma_bd(%B : memref<1536xi32> offset = 768 len = 384 sizes = [1, 1, 1, 384] strides = [0, 0, 0, 1]) {bd_id = 1 : i32}
    aie.end
  } {repeat_count = 0 : i32}
  aiex.dma_start_task(%task148)
  aiex.dma_await_task(%task53)
  %task153 = aiex.dma_configure_task(%tile_3_0, S2MM, 0) {
    aie.dma_bd(%C : memref<5120xi32> offset = 4108 len = 128 sizes = [2, 1, 32, 4] strides = [16, 0, 32, 1]) {bd_id = 2 : i32}
    aie.end
  } {issue_token = true, repeat_count = 1 : i32}
  aiex.dma_start_task(%task153)
  aiex.dma_free_task(%task54)
  %task154 = aiex.dma_configure_task(%tile_3_0, MM2S, 0) {
    aie.dma_bd(%A : memref<1920xi32> offset = 1824 len = 96 sizes = [1, 1, 1, 96] strides = [0, 0, 0, 1]) {bd_id = 0 : i32}
    aie.end
  } {repeat_count = 1 : i32}
  aiex.dma_start_task(%task154)
  aiex.dma_free_task(%task55)
  %task155 = aiex.dma_configure_task(%tile_3_0, MM2S, 1) {
    aie.dma_bd(%B : memref<1536xi32> offset = 1152 len = 384 sizes = [1, 1, 1, 384] strides = [0, 0, 0, 1]) {bd_id = 1 : i32}
    aie.end
  } {repeat_count = 0 : i32}
  aiex.dma_start_task(%task155)
  aiex.dma_await_task(%task59)
  aiex.dma_await_task(%task65)
  aiex.dma_await_task(%task71)
  aiex.dma_await_task(%task77)
  aiex.dma_await_task(%task83)
  aiex.dma_await_task(%task89)
  aiex.dma_await_task(%task95)
  aiex.dma_await_task(%task101)
  aiex.dma_await_task(%task107)
  aiex.dma_await_task(%task113)
  aiex.dma_await_task(%task119)
  aiex.dma_await_task(%task125)
  aiex.dma_await_task(%task132)
  aiex.dma_await_task(%task139)
  aiex.dma_await_task(%task146)
  aiex.dma_await_task(%task153)
}
